"""Diagnosis from a client's place: ``metaq doctor``, ``why-not-consuming``, ``debug-bundle``."""
