"""What an administrator sees and changes of a server that runs, over HTTP and with a key of its own."""
