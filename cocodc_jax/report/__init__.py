"""What a run leaves behind: records, progress, plots and a one-page report."""
