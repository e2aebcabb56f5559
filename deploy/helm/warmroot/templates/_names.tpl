{{- define "warmroot.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 47 | trimSuffix "-" }}
{{- end }}

{{/* KubeRay makes longer names of a RayService's: it may have 47 characters. */}}
{{- define "warmroot.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 47 | trimSuffix "-" }}
{{- else if contains (include "warmroot.name" .) .Release.Name }}
{{- .Release.Name | trunc 47 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "warmroot.name" .) | trunc 47 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/*
Labels of pods, by which objects of this release find them. Not app.kubernetes.io/name: KubeRay looks for the head by its
own. Nor anything that a new version of the chart changes: all pods would start anew.
*/}}
{{- define "warmroot.selector" -}}
app.kubernetes.io/part-of: {{ include "warmroot.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "warmroot.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/name: {{ include "warmroot.name" . }}
{{ include "warmroot.selector" . }}
{{- end }}

{{- define "warmroot.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "warmroot.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "warmroot.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{/* KubeRay names the Service of a RayService's proxies; there is none where upgrades go in steps. */}}
{{- define "warmroot.serveService" -}}
{{ include "warmroot.fullname" . }}-serve-svc
{{- end }}

{{- define "warmroot.inSteps" -}}
{{- if eq .Values.upgradeStrategy "NewClusterWithIncrementalUpgrade" }}true{{ end }}
{{- end }}
