"""Answers of a given form: rules are checked, compiled once, and followed token by token."""
