"""What an engine computes, as torch modules: the target families and the drafters."""
