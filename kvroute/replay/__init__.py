"""Routes in the form that each trainer takes. One module per trainer; import only the one in use: most need torch."""
