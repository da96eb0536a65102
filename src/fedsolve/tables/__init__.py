"""Tables: what a row is (schema), how it is read, encoded and prepared. Knows no federation."""
