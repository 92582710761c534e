"""What regenerates the tables and plots of the papers: see README.md."""
