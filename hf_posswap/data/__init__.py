"""Text, tables and batches of token ids, from files, the Hub and the standard library."""
