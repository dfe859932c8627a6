"""Sharing: what is known of a model as one file, the card that is written from it, and the way to the Hub and back."""
