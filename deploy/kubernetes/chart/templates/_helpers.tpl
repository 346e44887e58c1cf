{{- define "attention.name" -}}
{{- $name := .Chart.Name -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "attention.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "attention.labels" -}}
{{ include "attention.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* The most pods that there may be: each takes that share of the limits. */ -}}
{{- define "attention.most" -}}
{{- ternary .Values.replicas .Values.autoscaling.maxReplicas (eq .Values.autoscaling.kind "none") | int -}}
{{- end }}

{{- define "attention.least" -}}
{{- ternary .Values.replicas .Values.autoscaling.minReplicas (eq .Values.autoscaling.kind "none") | int -}}
{{- end }}

{{- /* Memory that the service may use, of all pods together, as the service divides it. */ -}}
{{- define "attention.budget" -}}
{{- mul (div (mul (sub (int .Values.memoryMiB) 512) 8) 10) (include "attention.most" . | int) -}}MiB
{{- end }}

{{- define "attention.claim" -}}
{{- .Values.store.claim | default (printf "%s-store" (include "attention.name" .)) -}}
{{- end }}

{{- /* The settings of a pod; those of the values win over what may be changed. */ -}}
{{- define "attention.settings" -}}
{{- $gpu := gt (int .Values.gpus) 0 -}}
{{- $own := dict (ternary "host_memory_budget" "memory_budget" $gpu) (include "attention.budget" .) "log_format" "json" -}}
{{- if or .Values.gateway.enabled .Values.ingress.enabled -}}
{{- $_ := set $own "max_connections_per_address" 4096 -}}
{{- end -}}
{{- if not .Values.keys.required -}}
{{- $name := include "attention.name" . -}}
{{- $inside := printf "%s.%s" $name .Release.Namespace -}}
{{- $names := list $name $inside (printf "%s.svc" $inside) (printf "%s.svc.cluster.local" $inside) -}}
{{- $_ := set $own "allowed_hosts" (concat $names .Values.gateway.hosts (list .Values.ingress.host) | compact | join ",") -}}
{{- end -}}
{{- $fixed := dict "host" "0.0.0.0" "port" 8000 "health_port" 8001 "models_dir" "/data" -}}
{{- $_ := set $fixed "require_keys" .Values.keys.required -}}
{{- $_ := set $fixed "first_key" .Values.keys.first -}}
{{- $_ := set $fixed "replicas" (include "attention.most" . | int) -}}
{{- $_ := set $fixed "device" (ternary "cuda" "cpu" $gpu) -}}
{{- $_ := set $fixed "threads" (max 1 (ceil .Values.cpu)) -}}
{{- $_ := set $fixed "drain_seconds" .Values.drainSeconds -}}
{{- with .Values.trustedProxies }}{{ $_ := set $fixed "trusted_proxies" . }}{{ end -}}
{{- merge $fixed (deepCopy .Values.settings) $own | toYaml -}}
{{- end }}

{{- define "attention.check" -}}
{{- $values := .Values -}}
{{- if gt (include "attention.most" . | int) 1 -}}
{{- if $values.store.ephemeral }}{{ fail "store.ephemeral: several replicas need one store" }}{{ end -}}
{{- if and (not $values.store.claim) (ne $values.store.accessMode "ReadWriteMany") -}}
{{- fail "store.accessMode: several replicas need a store that several nodes can mount: ReadWriteMany" -}}
{{- end -}}
{{- end -}}
{{- if and $values.gateway.enabled $values.ingress.enabled }}{{ fail "gateway and ingress: expected one of the two" }}{{ end -}}
{{- if lt (int $values.autoscaling.maxReplicas) (int $values.autoscaling.minReplicas) -}}
{{- fail "autoscaling.maxReplicas: expected no less than minReplicas" -}}
{{- end -}}
{{- end }}
