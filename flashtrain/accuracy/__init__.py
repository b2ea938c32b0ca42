"""How near attention comes to the right numbers on this device."""
