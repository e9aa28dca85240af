"""What several stages need of the network: requests with deadlines, servers for this user alone, the hub."""
