"""Two servers, the same requests: which is better, by how much, and is it more than chance?"""
