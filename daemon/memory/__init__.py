"""What memory there is: host limits, and the device readings the batch follows."""
