"""What measures and what makes traffic: requests and their lengths, arrivals, latencies, processes, price."""
