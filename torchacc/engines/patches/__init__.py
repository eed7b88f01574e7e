"""Everything that changes or reaches into other libraries, each patch with the versions that it is for."""
