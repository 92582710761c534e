"""Engine bundles: configuration, manifest, writing, scores, fixed budgets."""
