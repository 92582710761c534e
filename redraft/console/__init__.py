"""What commands share on the terminal: progress, interruption, checks of disk and memory."""
