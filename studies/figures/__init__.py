"""Tables and plots of the documentation."""
