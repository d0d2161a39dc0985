"""The symmetric heap: arena, leases, barrier and faults."""
