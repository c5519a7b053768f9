"""Task sets: are our verdicts those of the packages themselves?"""
