"""Proves on the user's own machine that speculation changes nothing but the speed."""
