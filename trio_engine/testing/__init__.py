"""Public kit for testing against engines and clients. Importable without torch, zmq and pytest."""
