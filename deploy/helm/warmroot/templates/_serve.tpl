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

{{/* The keys in config by which the number of replicas follows the work, as deploy/serve_config.py takes them. */}}
{{- define "warmroot.scalingKeys" -}}
max_replicas min_replicas target_queue_wait ttft_slo itl_slo max_kv_usage upscale_delay downscale_delay
scale_to_zero_delay max_upscale_step max_downscale_step
{{- end }}

{{/*
Arguments of warmroot.deploy.app:build_app: the given keys, and what the chart knows better. Numbers of copies, and what
they follow, stand beside the deployments: other arguments build the application anew, others of those only add or
remove copies. Ingresses have to know whether they are several, and that there may be no replica.
*/}}
{{- define "warmroot.args" -}}
{{- $args := deepCopy .Values.config }}
{{- if .Values.models }}
{{- $_ := unset $args "model" }}
{{- $_ := set $args "models" .Values.models }}
{{- else }}
{{- $_ := unset $args "num_replicas" }}
{{- $toZero := and $args.max_replicas (hasKey $args "min_replicas") (not $args.min_replicas) }}
{{- range splitList " " (include "warmroot.scalingKeys" . | replace "\n" " ") }}
{{- $_ := unset $args . }}
{{- end }}
{{- if $toZero }}
{{- $_ := set $args "min_replicas" 0 }}
{{- $_ := set $args "max_replicas" 1 }}
{{- end }}
{{- end }}
{{- if gt (int .Values.ingress.replicas) 1 }}
{{- $_ := set $args "num_ingress" 2 }}
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
{{- if .Values.tls.channel.secretName }}
{{- $_ := set $args "channel_certfile" "/etc/warmroot/channel/tls.crt" }}
{{- $_ := set $args "channel_keyfile" "/etc/warmroot/channel/tls.key" }}
{{- $_ := set $args "channel_ca_certs" "/etc/warmroot/channel/ca.crt" }}
{{- end }}
{{- toYaml $args }}
{{- end }}

{{/* The policy has delays of its own, so Serve's are 0. */}}
{{- define "warmroot.autoscaling" -}}
{{- $config := .Values.config }}
{{- $names := $config.served_model_name | default $config.model }}
{{- $keys := dict "model" $names }}
{{- if kindIs "slice" $names }}
{{- $_ := set $keys "model" (first $names) }}
{{- end }}
{{- range splitList " " (include "warmroot.scalingKeys" . | replace "\n" " ") }}
{{- if hasKey $config . }}
{{- $_ := set $keys . (get $config .) }}
{{- end }}
{{- end }}
{{- if hasKey $config "replica_start_timeout" }}
{{- $_ := set $keys "replica_start_timeout" $config.replica_start_timeout }}
{{- end -}}
min_replicas: {{ hasKey $config "min_replicas" | ternary $config.min_replicas 1 }}
max_replicas: {{ $config.max_replicas }}
upscale_delay_s: 0.0
downscale_delay_s: 0.0
policy:
  policy_function: warmroot.deploy.autoscaling:ScalingPolicy
  policy_kwargs: {{- toYaml $keys | nindent 4 }}
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
      {{- if not .Values.models }}
      - name: Replica
        {{- if .Values.config.max_replicas }}
        autoscaling_config: {{- include "warmroot.autoscaling" . | nindent 10 }}
        {{- else }}
        num_replicas: {{ default 1 .Values.config.num_replicas }}
        {{- end }}
      {{- end }}
{{- end }}
