"""Pure functions of speculative decoding: token trees, their construction from drafts, sampling and verification."""
