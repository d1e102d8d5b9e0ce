// Renders the templates of a chart as Helm does, as far as those of deploy/helm/metaq go: the same template language, and
// the few functions that they use. It needs only Go's standard library, where Helm takes minutes to build.
//
// render FOLDER < JSON prints the text of each template by its name, as JSON; a template that fails ends it with the reason.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"
)

// toYaml writes a map in lines, with values as JSON, which is YAML, too.
func toYaml(value any) string {
	members, isMap := value.(map[string]any)
	if !isMap || len(members) == 0 {
		text, _ := json.Marshal(value)
		return string(text)
	}
	lines := []string{}
	for name, member := range members {
		text, _ := json.Marshal(member)
		lines = append(lines, fmt.Sprintf("%s: %s", name, text))
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

func indent(spaces int, text string) string {
	pad := strings.Repeat(" ", spaces)
	return pad + strings.ReplaceAll(text, "\n", "\n"+pad)
}

func isEmpty(value any) bool {
	return value == nil || value == "" || value == false || value == float64(0)
}

func functions(all *template.Template) template.FuncMap {
	return template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var text bytes.Buffer
			err := all.ExecuteTemplate(&text, name, data)
			return text.String(), err
		},
		"fail":    func(reason string) (string, error) { return "", errors.New(reason) },
		"toYaml":  toYaml,
		"nindent": func(spaces int, text string) string { return "\n" + indent(spaces, text) },
		"quote":   func(value any) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"int": func(value any) int {
			number, _ := value.(float64)
			return int(number)
		},
		"default": func(otherwise any, value any) any {
			if isEmpty(value) {
				return otherwise
			}
			return value
		},
		"trunc": func(most int, text string) string {
			if len(text) > most {
				return text[:most]
			}
			return text
		},
		"trimSuffix": func(suffix string, text string) string { return strings.TrimSuffix(text, suffix) },
		"sha256sum":  func(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) },
	}
}

func render(folder string) (map[string]string, error) {
	var data map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&data); err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil {
		return nil, err
	}
	all := template.New("chart")
	all.Funcs(functions(all))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if _, err := all.New(filepath.Base(file)).Parse(string(text)); err != nil {
			return nil, err
		}
	}
	rendered := map[string]string{}
	for _, file := range files {
		name := filepath.Base(file)
		if strings.HasPrefix(name, "_") {
			continue
		}
		var text bytes.Buffer
		if err := all.ExecuteTemplate(&text, name, data); err != nil {
			return nil, err
		}
		rendered[name] = text.String()
	}
	return rendered, nil
}

func main() {
	rendered, err := render(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(rendered)
}
