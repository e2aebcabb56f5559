{{/* Where the replicas' metadata is: a URL without its password. */}}
{{- define "warmroot.metadataStore" -}}
{{- if eq .Values.metadataStore.mode "redis" -}}
redis://{{ include "warmroot.fullname" . }}-metadata:6379
{{- else if eq .Values.metadataStore.mode "external" -}}
{{ required "metadataStore.url: needed where metadataStore.mode is external" .Values.metadataStore.url }}
{{- else -}}
embedded
{{- end }}
{{- end }}

{{/*
Arguments of warmroot.deploy.app:build_app: the given keys, and what the chart knows better. Numbers of copies stand
beside the deployments: other arguments build the application anew, other numbers only add or remove copies. With
max_replicas Serve finds the number itself.
*/}}
{{- define "warmroot.args" -}}
{{- $args := deepCopy .Values.config }}
{{- if .Values.models }}
{{- $_ := unset $args "model" }}
{{- $_ := set $args "models" .Values.models }}
{{- else }}
{{- $_ := unset $args "num_replicas" }}
{{- end }}
{{- $_ := set $args "metadata_store" (include "warmroot.metadataStore" .) }}
{{- if not (hasKey $args "node_labels") }}
{{- $_ := set $args "node_labels" (list "warmroot.io/role=replica") }}
{{- end }}
{{- if not (hasKey $args "shutdown_grace") }}
{{- $_ := set $args "shutdown_grace" (sub .Values.terminationGracePeriodSeconds 60) }}
{{- end }}
{{- if .Values.auth.apiKeysFile.secretName }}
{{- $_ := set $args "api_keys_file" (printf "/etc/warmroot/keys/%s" .Values.auth.apiKeysFile.key) }}
{{- end }}
{{- toYaml $args }}
{{- end }}

{{- define "warmroot.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: {{ .Values.applicationName }}
    route_prefix: {{ default "/" .Values.config.root_path }}
    import_path: warmroot.deploy.app:build_app
    args:
      {{- include "warmroot.args" . | nindent 6 }}
    deployments:
      - name: Ingress
        num_replicas: {{ .Values.ingress.replicas }}
        ray_actor_options:
          num_cpus: 1
          label_selector:
            warmroot.io/role: ingress
      {{- if not (or .Values.models .Values.config.max_replicas) }}
      - name: Replica
        num_replicas: {{ default 1 .Values.config.num_replicas }}
      {{- end }}
{{- end }}
