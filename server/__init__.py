"""What runs on the server: the federation, the tap on the wire, and the adversary behind it."""
