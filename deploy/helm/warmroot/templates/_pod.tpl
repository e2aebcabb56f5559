{{/* Variables of every Ray container: Ray reads them when its processes start. Values are texts. */}}
{{- define "warmroot.env" -}}
- name: RAY_SERVE_ENABLE_HA_PROXY
  value: "1"
- name: RAY_SERVE_THROUGHPUT_OPTIMIZED
  value: "1"
# An ingress that dies is found out by its first refused connection, not only by the next check.
- name: RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S
  value: "1"
- name: RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL
  value: "3"
# Serve copies it into HAProxy's configuration as it stands: whoever waits for an ingress that is cut off need not wait on.
- name: RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER
  value: 1s on-marked-down shutdown-sessions
# A node that does not answer for three seconds is dead.
- name: RAY_health_check_initial_delay_ms
  value: "5000"
- name: RAY_health_check_period_ms
  value: "1000"
- name: RAY_health_check_timeout_ms
  value: "1000"
- name: RAY_health_check_failure_threshold
  value: "3"
# A HAProxy that has died is started again after three checks that it fails.
- name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S
  value: "1"
- name: RAY_worker_niceness
  value: "0"
- name: RAY_agent_register_timeout_ms
  value: "120000"
# Ray's control store keeps a record of every call otherwise, 100,000 of them.
- name: RAY_task_events_report_interval_ms
  value: "0"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# A node that is to go finishes its streams: thirty seconds before Kubernetes kills it.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ sub .Values.terminationGracePeriodSeconds 30 | quote }}
# Replicas outlive a head that is away for so long.
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "600"
- name: HF_HOME
  value: /var/cache/warmroot/huggingface
{{- if .Values.weights.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with .Values.weights.huggingFaceToken }}{{- if .secretName }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .key }}}}
{{- end }}{{- end }}
{{- with .Values.auth.apiKey }}{{- if .secretName }}
- name: WARMROOT_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .key }}}}
{{- end }}{{- end }}
{{- with .Values.auth.adminApiKey }}{{- if .secretName }}
- name: WARMROOT_ADMIN_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .key }}}}
{{- end }}{{- end }}
{{- if ne .Values.metadataStore.mode "embedded" }}{{- with .Values.metadataStore.passwordSecret }}{{- if .name }}
- name: WARMROOT_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}{{- end }}{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "warmroot.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "warmroot.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "warmroot.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/warmroot}
- {name: weights, mountPath: /var/cache/warmroot}
{{- if .Values.auth.apiKeysFile.secretName }}
- {name: api-keys, mountPath: /etc/warmroot/keys, readOnly: true}
{{- end }}
{{- if .Values.tls.channel.secretName }}
- {name: channel-tls, mountPath: /etc/warmroot/channel, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "warmroot.volumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: weights
  {{- $cache := .Values.weights.cache }}
  {{- if eq $cache.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-weights" (include "warmroot.fullname" .)) $cache.claimName }}
  {{- else if eq $cache.type "hostPath" }}
  hostPath:
    path: {{ required "weights.cache.hostPath: needed where weights.cache.type is hostPath" $cache.hostPath }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir:
    sizeLimit: {{ $cache.sizeLimit }}
  {{- end }}
{{- with .Values.auth.apiKeysFile.secretName }}
- name: api-keys
  secret: {secretName: {{ . }}, defaultMode: 288}
{{- end }}
{{- with .Values.tls.channel.secretName }}
- name: channel-tls
  secret: {secretName: {{ . }}, defaultMode: 288}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Requests are limits: Ray takes a container's limits for the node's resources. gpu and memory as given. */}}
{{- define "warmroot.resources" -}}
{{- $amounts := dict "cpu" .cpu "memory" .memory -}}
{{- if .gpu }}
{{- $_ := set $amounts (default "nvidia.com/gpu" .gpuResource) .gpu }}
{{- end }}
{{- range $name, $amount := .extra }}
{{- $_ := set $amounts $name $amount }}
{{- end -}}
requests: {{- toYaml $amounts | nindent 2 }}
limits: {{- toYaml $amounts | nindent 2 }}
{{- end }}

{{/* A pod template. Takes root, role (head, ingress, worker), group (its settings) and ports. */}}
{{- define "warmroot.podTemplate" -}}
{{- $root := .root -}}
{{- $sharesMemory := and (eq .role "worker") $root.Values.sharedMemory.sizeLimit -}}
metadata:
  labels:
    {{- include "warmroot.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    {{- with $root.Values.podLabels }}{{ toYaml . | nindent 4 }}{{- end }}
  {{- $annotations := merge (dict) (default dict .group.podAnnotations) $root.Values.podAnnotations }}
  {{- if eq .role "head" }}
  {{- $_ := set $annotations "karpenter.sh/do-not-disrupt" "true" }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- range $name, $value := . }}
    {{ $name }}: {{ $value | quote }}
    {{- end }}
  {{- end }}
spec:
  serviceAccountName: {{ include "warmroot.serviceAccount" $root }}
  automountServiceAccountToken: {{ eq .role "head" }}
  terminationGracePeriodSeconds: {{ $root.Values.terminationGracePeriodSeconds }}
  restartPolicy: {{ ternary "Never" "Always" $root.Values.autoscaler.enabled }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- include "warmroot.podSecurity" $root | nindent 4 }}
  {{- with .group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .group.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $tolerations := default list .group.tolerations }}
  {{- if .group.resources.gpu }}
  {{- $resource := default "nvidia.com/gpu" .group.resources.gpuResource }}
  {{- $tolerations = append $tolerations (dict "key" $resource "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" (eq .role "head") }}
      image: {{ include "warmroot.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env: {{- include "warmroot.env" $root | nindent 8 }}
        {{- with .group.env }}{{ toYaml . | nindent 8 }}{{- end }}
      ports: {{- toYaml .ports | nindent 8 }}
      resources: {{- include "warmroot.resources" .group.resources | nindent 8 }}
      securityContext: {{- include "warmroot.containerSecurity" $root | nindent 8 }}
      volumeMounts: {{- include "warmroot.volumeMounts" $root | nindent 8 }}
        {{- if $sharesMemory }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
  volumes: {{- include "warmroot.volumes" $root | nindent 4 }}
    {{- if $sharesMemory }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.sharedMemory.sizeLimit }}}
    {{- end }}
{{- end }}
