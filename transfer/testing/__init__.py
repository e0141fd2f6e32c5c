"""What any link has to do, as a test class for those who write one."""
