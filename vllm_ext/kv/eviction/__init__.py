"""What leaves first: chunks of host memory, and blocks of the device."""
