"""What a service withstands: malformed requests."""
