"""Sharing: results as one file, the card that is written from it, export, deltas, and the Hub."""
