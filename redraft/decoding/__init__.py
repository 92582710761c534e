"""Pure functions of speculative decoding: token trees, their construction from drafts, sampling and verification."""

import redraft.decoding.rejection  # noqa: F401 (registers its verifiers)
