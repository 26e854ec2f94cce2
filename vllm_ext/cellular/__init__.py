"""BatchMaker's cellular batching: a small serving engine for models whose requests are many small steps.

Source: BatchMaker (EuroSys '18), as chapter 2 of Lingfan Yu's dissertation (New York University, 2024).
"""
