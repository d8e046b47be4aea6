"""What operators cost on a device: kernels, their time by a roofline or as measured."""
