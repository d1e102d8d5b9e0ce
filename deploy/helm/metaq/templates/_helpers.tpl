{{- define "metaq.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "metaq.selector" -}}
app.kubernetes.io/name: metaq
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "metaq.labels" -}}
{{ include "metaq.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "metaq.settings" -}}
{{ toYaml .Values.settings }}
{{- end }}

{{- define "metaq.check" -}}
{{- if not .Values.image.repository }}
{{- fail "image.repository: set where the image of metaq is; the Containerfile builds it" }}
{{- end }}
{{- if not (or .Values.usersSecret .Values.settings.allow_public) }}
{{- fail "usersSecret or settings.allow_public: without users everybody who can reach the broker may do everything; choose one" }}
{{- end }}
{{- if and (gt (int .Values.replicas) 1) (not .Values.settings.zookeeper) }}
{{- fail "replicas: more than 1 elect their master through ZooKeeper; set settings.zookeeper to HOST:PORT,HOST:PORT" }}
{{- end }}
{{- if eq (int .Values.replicas) 2 }}
{{- fail "replicas: two cannot continue safely when one is lost; use 1, or 3 and more" }}
{{- end }}
{{- end }}
