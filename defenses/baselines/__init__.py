"""The published methods that BDS and Panacea are compared with, on the same loop and rows."""
