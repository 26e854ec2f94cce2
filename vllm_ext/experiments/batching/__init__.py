"""Manners of batching small steps beside each other, in virtual time: what reproductions of BatchMaker share."""
