"""Engine bundles: configuration, manifest, writing, budget tables."""
