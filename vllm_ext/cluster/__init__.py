"""Several engines behind one address, on Ray; and sweeps over the machines of a Ray cluster."""
