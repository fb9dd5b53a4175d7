"""The URLs of the Django project of the tests."""

from django.urls import include, path

urlpatterns = [path("beat/", include("singlebeat.web.django"))]
