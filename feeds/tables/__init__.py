"""Files that hold tables: Parquet, Arrow, Databento's DBN. Their numbers are read exactly."""
