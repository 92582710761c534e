"""From networks to engine bundles: methods, graph passes, one writer per backend."""
