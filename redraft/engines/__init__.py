"""Engine backends: load a bundle's networks and execute them on one device."""
