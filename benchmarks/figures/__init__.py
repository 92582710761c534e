"""Tables and plots of load tests."""
