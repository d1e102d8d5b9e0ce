"""Is everything as a client needs it: ``metaq doctor``, ``why-not-consuming``, ``debug-bundle``."""
