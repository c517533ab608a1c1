"""What people see: tables and progress in the terminal."""
