"""systemd: the units that this package writes, and the engine units that it reads."""
