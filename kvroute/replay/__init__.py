"""Routes in the form each trainer takes them. One module a trainer; import the one in use, most of them need torch."""
