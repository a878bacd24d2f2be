"""Reports: runs side by side, as tables, files and pictures."""
