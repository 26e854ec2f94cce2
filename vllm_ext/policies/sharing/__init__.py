"""Policies of the axis *sharing*: whose turn is it?"""
