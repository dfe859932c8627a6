"""What recipes share: options, the swapped model, the result file, and finished runs side by side."""
