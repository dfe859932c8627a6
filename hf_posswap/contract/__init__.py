"""The contract of schemes, as checks that anybody can run on a scheme of their own."""
