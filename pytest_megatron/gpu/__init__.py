"""GPUs of this host: leases, health, monitoring."""
